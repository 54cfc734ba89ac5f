"""Real, emulated and simulated runtimes of workers, behind one interface.

- `join`: the runtime of this process; start here.
- `real`: one process per worker, on the wall clock.
- `emulated`: one process per worker, on a shaped network inside one Linux machine.
- `simulated`: one thread per worker, in virtual time.
- `launchers`: rank and size, from the variables of torchrun, srun or mpirun.
- `service_placement`: where servers run: `ServiceSpec.place`.
- `processes`: a launcher's processes: supervises and ends them, passes on their output, reports
  failures.
- `exec_with_parent`: starts a command so that the kernel kills it with its launcher.
- `temporary_folder`: a launcher's temporary folder, which it removes in every kind of end.
- `spawn_check`: detects scripts that start processes or process groups themselves.
- `progress`: the progress of workers.
- `results`: the result of one run, as ``--json`` prints it.
- `python_internals`: all private names of Python's library that paceline uses.
"""
