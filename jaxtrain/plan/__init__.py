"""Foresight: what a run needs and how fast it is on devices that are not here.

`targets` knows devices by name, `compile_target` compiles the train step of a run for them,
`memory` says what the compiled program needs, `hlo`, `work`, `traffic` and `cost` what it does and
how long that takes, and `planner` puts it all into a `Plan` (`result`). `search` finds the best of
all meshes with the estimates of `analytic` and `traced`, and `reasons` says why; `commands` is what
the flags call, `table` and `html` are what people read.
"""
