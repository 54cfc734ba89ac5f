"""Where workers live: real, emulated and simulated runtimes behind one interface.

- `join`: the runtime of this process; start here.
- `real`: one process a worker, on the wall clock.
- `emulated`: the same, on a shaped network inside one Linux machine.
- `simulated`: one thread a worker, in virtual time.
- `launchers`: rank and size, from the variables of torchrun, srun or mpirun.
- `service_placement`: where servers run: `Service.place`.
- `processes`, `temporary_folder`: a launcher's processes and temporary folder, and how they end.
- `spawn_check`, `script_process_groups`: scripts that start processes or process groups themselves.
- `failures`: how a job failed, the first cause first.
- `progress`, `output`: how far workers are, and what they print.
- `results`: one run in one object: what ``--json`` prints.
- `python_internals`: private names of Python's library, in one place.
"""
