"""One worker's training: PyTorch's hooks become the hooks of a method's worker.

- `distribute`: `paceline.distribute`: its arguments are checked, and read.
- `training_setup`: from a method and its settings to a training that has started on all ranks.
- `settings`: the settings beside a method, and the spec that chooses both.
- `optimizer`: the wrapped optimizer, and its active training.
- `training`: `Training`, which the wrapped optimizer calls; start here. `context`: what its parts share.
- `backward_passes`: hooks into the user's model: which passes are a step's, and what each weighs.
- `step`: the order of events in a step: what the method is told, and what training itself sends.
- `reducer`: gradients, from their hooks into buckets, and on in plan order.
- `participation`: how workers learn who trains, and which tensors were used.
- `averages`, `compressed_average`: the averages that a method asks for, and those of compressors.
- `run`: the `Run` that a method sees, one kind for each kind of method.
- `method_hooks`: calls the hooks of a method's worker.
- `load_hooks`: notices what the script loads, where servers update.
- `sampler`: `Sampler`: each worker's share of every batch.
- `broadcast`: whole tensors from one rank to all, and actions on all ranks.
- `module_buffers`: BatchNorm's statistics, and other buffers of the model.
- `misuse`: finds silent mistakes, such as a model inside DDP, or the same data on all workers.
- `lazy_parameters`: tells a method that something is about to use parameters.
- `step_listeners`, `step_loggers`: observers of steps: compute times, profilers, loggers.
- `random_state`: random generators: seeded, saved and restored.
- `checkpoint`: `save` and `load`.
"""
