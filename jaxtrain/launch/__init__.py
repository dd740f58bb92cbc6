"""How the processes of a run find each other: launchers, and the first meeting."""
