"""One worker's training: PyTorch's hooks become a method's hooks.

- `distribute`, `start`: `paceline.distribute`; `settings`, `method_spec`: what it is told.
- `optimizer`: what it gives back; `active_training`: which training that is, where methods change.
- `training`: `Training`, which the wrapped optimizer calls; start here. `parts`: what it is made of.
- `backward_passes`: hooks into the user's model: which passes are a step's.
- `step`: what the method is told in a step, and what training itself sends.
- `reducer`: gradients, from their hooks into buckets, and on in plan order.
- `presence`: who trains, as this worker knows it; `participation`: how workers learn it, beside
  the means that they form; `delayed_participation`: how workers in groups do.
- `averages`: what a method's means are made of; `compressed_average`: through a compressor.
- `run`: the `Run` that a method sees, one kind for each kind of method.
- `lazy_parameters`, `parameter_use`: when a module is about to use parameters.
- `method_hooks`: calls a method's hooks, and refuses those that there are not.
- `step_listeners`: those who only watch: compute time, the planner, and others.
- `checkpoint`: `save` and `load`; `own_state`: what a checkpoint keeps of one worker alone.
"""
