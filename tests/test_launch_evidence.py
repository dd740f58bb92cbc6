"""Which process of which run: the cases A1, A2, A3 and A6, and every launcher's variables."""

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.launch.decision import Decision, parse_address
from jaxtrain.launch.evidence import decide
from jaxtrain.launch.local_devices import count_visible, local_device_ids
from jaxtrain.launch.nodes import expand_counts, expand_nodes

SLURM = {
    "SLURM_JOB_ID": "123",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu-a-[001-002]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "gpu-a-002",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "PROCESSES_IN_JOB": "2",
    "JOB_INDEX": "1",
    "REPLICATED_JOB_REPLICAS": "3",
    "JOBSET_NAME": "lm",
    "REPLICATED_JOB_NAME": "workers",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def place(decision):
    return decision.launcher, decision.process_id, decision.num_processes


# A1: node lists


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node[01-03,7]", "node01 node02 node03 node7"),
        ("gpu-a-[001-002]", "gpu-a-001 gpu-a-002"),
        ("alpha,beta,gamma", "alpha beta gamma"),
        ("login-x,node[01-03]", "login-x node01 node02 node03"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("node[8-10]", "node8 node9 node10"),
        ("r[1-2]n[08-10].x", "r1n08.x r1n09.x r1n10.x r2n08.x r2n09.x r2n10.x"),
        ("single", "single"),
    ],
)
def test_a1_node_lists(text, expected):
    assert expand_nodes(text) == expected.split()
    decision = decide(without(SLURM, "SLURM_STEP_TASKS_PER_NODE") | {"SLURM_STEP_NODELIST": text})
    assert decision.coordinator.startswith(f"{expected.split()[0]}:")


@pytest.mark.parametrize("text", ["node[01-03", "node]1[", "node[3-1]", "node[a-b]", "a,,b", ""])
def test_a1_what_is_no_node_list_is_refused(text):
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST="):
        expand_nodes(text, "SLURM_STEP_NODELIST")


def test_tasks_per_node():
    assert expand_counts("2(x3),1", "X") == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match=r"X='2x3' must be numbers of tasks"):
        expand_counts("2x3", "X")


# A2: Slurm


def test_a2_a_task_of_srun():
    decision = decide(SLURM)
    assert place(decision) == ("slurm", 3, 4)
    assert (decision.local_process_id, decision.local_num_processes) == (1, 2)
    assert decision.node == "gpu-a-002"
    host, port = parse_address(decision.coordinator, "coordinator")
    assert host == "gpu-a-001"
    # Outside of what outgoing connections are given, and another one for the job's next step.
    assert 61440 <= port < 65536
    assert decide(SLURM | {"SLURM_STEP_ID": "1"}).coordinator != decision.coordinator
    assert decision.describe().startswith(
        f"launcher slurm: process 3 of 4, coordinator gpu-a-001:{port} (SLURM_JOB_ID=123 "
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "123"},
        {"SLURM_JOB_ID": "123", "SLURM_STEP_NODELIST": "node[1-2]"},
        # The script of a batch job is no task of its own.
        without(SLURM, "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"),
    ],
)
def test_a2_half_set_slurm_is_left_aside_with_a_reason(environ):
    decision = decide(environ)
    assert decision == Decision(notes=decision.notes)
    (note,) = decision.notes
    missing = "SLURM_PROCID" if "SLURM_PROCID" not in environ else "SLURM_STEP_NODELIST"
    assert note.startswith("slurm was not used: SLURM_JOB_ID=123")
    assert missing in note.partition("but not")[2]
    assert "srun sets them" in note
    with pytest.raises(ConfigError, match=f"launcher=slurm, but .* is set but not .*{missing}"):
        decide(environ, launcher="slurm")


def test_a2_one_task_is_a_single_process():
    for alone in ({"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "1"}):
        environ = SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
        environ |= {"SLURM_STEP_NODELIST": "node1"}
        decision = decide(without(environ, "SLURM_STEP_NUM_TASKS") | alone)
        assert place(decision) == ("slurm", 0, 1)
        assert decision.coordinator == ""
        assert "a single process" in decision.describe()


def test_the_step_counts_and_not_the_job_around_it():
    assert place(decide(SLURM | {"SLURM_NTASKS": "64"})) == ("slurm", 3, 4)


def test_slurm_evidence_is_cross_checked():
    with pytest.raises(ConfigError, match="process 4 of 4 does not exist"):
        decide(SLURM | {"SLURM_PROCID": "4"})
    with pytest.raises(ConfigError, match=r"is for 3 nodes, but .* has 2"):
        decide(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"})
    with pytest.raises(ConfigError, match="SLURM_PROCID=x must be a whole number"):
        decide(SLURM | {"SLURM_PROCID": "x"})


# A3: addresses and flags


@pytest.mark.parametrize(
    "text",
    [
        "localhost",
        "::1:46202",
        "tcp://127.0.0.1:46205",
        "node01:",
        "node01:0",
        "node01:70000",
        ":46202",
        "node 1:46202",
    ],
)
def test_a3_addresses_without_the_form_are_refused_at_once(text):
    with pytest.raises(ConfigError) as error:
        decide({}, coordinator=text, num_processes=2, process_id=0)
    assert f"coordinator={text} " in str(error.value)
    assert "write it as host:port or [IPv6]:port" in str(error.value)


def test_a3_addresses():
    assert parse_address("127.0.0.1:45671", "x") == ("127.0.0.1", 45671)
    assert parse_address("[::1]:46201", "x") == ("::1", 46201)
    assert parse_address("node01.cluster.local:1", "x") == ("node01.cluster.local", 1)


def test_flags_win_and_are_complete():
    decision = decide(SLURM, coordinator="[::1]:46201", num_processes=2, process_id=1)
    assert place(decision) == ("flags", 1, 2)
    assert decision.coordinator == "[::1]:46201"
    for given in ({"num_processes": 2}, {"process_id": 1}, {"num_processes": 2, "process_id": 1}):
        with pytest.raises(ConfigError, match=r"needs .*--coordinator"):
            decide({}, **given)
    with pytest.raises(ConfigError, match="process 2 of 2 does not exist"):
        decide({}, coordinator="a:1", num_processes=2, process_id=2)
    assert place(decide(SLURM, num_processes=1)) == ("flags", 0, 1)


def test_a_coordinator_alone_replaces_that_of_the_launcher():
    decision = decide(SLURM, coordinator="10.0.0.7:5000")
    assert place(decision) == ("slurm", 3, 4)
    assert decision.coordinator == "10.0.0.7:5000"
    assert "--coordinator=10.0.0.7:5000" in decision.describe()
    with pytest.raises(ConfigError, match="needs num_processes and process_id"):
        decide({}, coordinator="10.0.0.7:5000")


def test_nothing_is_a_single_process_without_a_word():
    assert decide({"PATH": "/bin"}) == Decision()
    assert Decision().describe() == ""
    assert decide(SLURM, launcher="none", num_processes=2, process_id=1) == Decision()
    with pytest.raises(ConfigError, match="launcher=mpi, but the environment has none"):
        decide(SLURM, launcher="mpi")


# The other launchers


def test_our_own_launcher():
    environ = {
        "JAXTRAIN_COORDINATOR": "127.0.0.1:5000",
        "JAXTRAIN_NUM_PROCESSES": "4",
        "JAXTRAIN_PROCESS_ID": "2",
        "JAXTRAIN_NODE": "a",
    }
    decision = decide(environ | SLURM)
    assert place(decision) == ("jaxtrain", 2, 4)
    assert decision.node == "a"
    with pytest.raises(ConfigError, match="is set but not JAXTRAIN_PROCESS_ID"):
        decide(without(environ, "JAXTRAIN_PROCESS_ID"))


def test_torchrun():
    decision = decide(TORCHRUN)
    assert place(decision) == ("torchrun", 5, 16)
    assert decision.coordinator == "10.0.0.1:29500"
    assert (decision.local_process_id, decision.local_num_processes) == (5, 8)
    # Its own store has taken the port.
    taken = decide(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert taken.coordinator == "10.0.0.1:29501"
    assert decide(TORCHRUN | {"MASTER_ADDR": "fe80::1"}).coordinator == "[fe80::1]:29500"


def test_half_set_torchrun_is_an_error_only_for_one_of_several():
    with pytest.raises(ConfigError, match=r"RANK=5 WORLD_SIZE=16 .* not MASTER_ADDR, MASTER_PORT"):
        decide(without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"))
    left_behind = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    decision = decide(left_behind)
    assert place(decision) == ("", 0, 1)
    assert decision.notes[0].startswith("torchrun was not used: MASTER_ADDR=10.0.0.1")
    # Slurm users export the address by hand; the ranks are Slurm's.
    assert place(decide(left_behind | SLURM)) == ("slurm", 3, 4)


@pytest.mark.parametrize(
    ("where", "host"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}, "10.96.0.1"),
        ({"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}, "10.96.0.1"),
        (
            {"OMPI_MCA_orte_hnp_uri": "156499968.0;tcp://192.0.2.2:49661;tcp6://[fd00::2]:41657"},
            "192.0.2.2",
        ),
        ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp6://[fe80::9b:ac5d,2620::2]:43370"}, "fe80::9b:ac5d"),
        ({"PMIX_NAMESPACE": "prterun-gpu-a-001-2041@1"}, "gpu-a-001"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1"),
    ],
)
def test_open_mpi(where, host):
    decision = decide(OPEN_MPI | where)
    assert place(decision) == ("mpi", 3, 4)
    assert parse_address(decision.coordinator, "x")[0] == host
    assert decision.local_process_id == 1
    others = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert decide(OPEN_MPI | where | others).coordinator == decision.coordinator


def test_mpi_that_does_not_say_where_process_0_is():
    with pytest.raises(ConfigError, match="does not say where process 0 is; give --coordinator"):
        decide(OPEN_MPI)
    assert decide(OPEN_MPI, coordinator="10.0.0.7:5000").coordinator == "10.0.0.7:5000"
    with pytest.raises(ConfigError, match="is set but not PMI_SIZE"):
        decide({"PMI_RANK": "0"})
    assert place(decide({"PMI_RANK": "0", "PMI_SIZE": "1"})) == ("mpi", 0, 1)


def test_mpirun_inside_of_a_slurm_task_is_the_launcher():
    """Its daemons are Slurm's tasks, one for each node."""
    environ = SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    environ |= OPEN_MPI | {"PMIX_NAMESPACE": "prterun-gpu-a-001-2041@1"}
    decision = decide(environ)
    assert place(decision) == ("mpi", 3, 4)
    assert "slurm was not used: mpirun started this process" in decision.notes[0]
    # Where srun started it with a PMIx of its own, both say the same.
    assert place(decide(SLURM | OPEN_MPI | {"PMIX_NAMESPACE": "prterun-a-1@1"}))[0] == "slurm"


def test_kubernetes():
    decision = decide(JOBSET)
    assert place(decision) == ("kubernetes", 3, 6)
    assert decision.coordinator == "lm-workers-0-0.lm:8476"
    indexed = {"JOB_COMPLETION_INDEX": "1", "PROCESSES_IN_JOB": "2"}
    decision = decide(indexed | {"JAX_COORDINATOR_ADDRESS": "lm-0.lm"})
    assert place(decision) == ("kubernetes", 1, 2)
    assert decision.coordinator == "lm-0.lm:8476"
    with pytest.raises(ConfigError, match="does not say where process 0 is; give --coordinator"):
        decide(indexed)
    assert place(decide(indexed, coordinator="10.0.0.7:5000")) == ("kubernetes", 1, 2)
    # An array of tasks that have nothing to do with each other.
    decision = decide({"JOB_COMPLETION_INDEX": "7"})
    assert place(decision) == ("", 0, 1)
    assert "kubernetes was not used: JOB_COMPLETION_INDEX=7" in decision.notes[0]


# A6: devices of a process


@pytest.mark.parametrize(
    ("visible", "local_id", "num_local", "expected"),
    [
        ("2,3", 1, 2, (1,)),  # (a) an index into the list, never 3
        ("0,1", 0, 1, (0, 1)),  # (b)
        ("3", 3, 4, (0,)),  # (c)
        ("MIG-1234-5678", 0, 1, (0,)),  # (d)
        ("GPU-8a1b,GPU-9c2d", 1, 2, (1,)),
        (None, 1, 2, (4, 5, 6, 7)),
        ("0,1,2,3", 1, 2, (2, 3)),
    ],
)
def test_a6_local_devices(visible, local_id, num_local, expected):
    assert local_device_ids(count_visible(visible, 8), local_id, num_local) == expected


def test_a6_more_processes_than_devices():
    with pytest.raises(ConfigError, match="8 processes on this node see 4 devices"):
        local_device_ids(4, 7, 8)
    with pytest.raises(ConfigError, match="cannot be shared equally by 3 processes"):
        local_device_ids(8, 0, 3)


def test_a6_no_visible_device():
    for visible in ("", "-1", "NoDevFiles"):
        assert count_visible(visible, 8) == 0
    assert count_visible("0,-1,2", 8) == 1


def test_a_process_per_device_or_per_node():
    assert local_device_ids(8, 2, 3, "device") == (2,)
    assert local_device_ids(4, 1, 2, "node") == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="local process 2 of 2"):
        local_device_ids(4, 2, 2)
