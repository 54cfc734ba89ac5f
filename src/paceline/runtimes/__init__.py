"""Where workers live: real, emulated and simulated runtimes behind one interface.

- `join`: the runtime of this process; start here.
- `real`: one process a worker, on the wall clock.
- `emulated`: the same, on a shaped network inside one Linux machine.
- `simulated`: one thread a worker, in virtual time.
- `launchers`: rank and size, from the variables of torchrun, srun or mpirun.
- `service_placement`: where servers run: `ServiceSpec.place`.
- `processes`: a launcher's processes: supervised and ended; what they print, how a job failed.
- `exec_with_parent`: starts a command so that the kernel kills it with its launcher.
- `temporary_folder`: a launcher's temporary folder, gone however it is told to end.
- `spawn_check`: scripts that start processes or process groups themselves.
- `progress`: how far workers are.
- `results`: one run in one object: what ``--json`` prints.
- `python_internals`: private names of Python's library, in one place.
"""
