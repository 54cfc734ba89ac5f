"""Where people train: trainers and engines of others, each imported only by those who use it.

========================  ==================================  ==============================
module                    what it gives                       extra
========================  ==================================  ==============================
``lightning``             ``Trainer(strategy="paceline")``    ``pip install paceline[lightning]``
``fabric``                ``Fabric(strategy=FabricStrategy())``  the same
``transformers``          ``attach(trainer, method=...)``     ``pip install paceline[transformers]``
``accelerate``            ``prepare(accelerator, ...)``       the same
``ray``                   ``run(loop, workers=...)``          ``pip install paceline[ray]``
========================  ==================================  ==============================

None of them averages anything by itself: each trainer is kept from wrapping the model in
DistributedDataParallel, and the plain model goes to `paceline.distribute`.

- `lightning`, `fabric`: strategies of Lightning and Fabric.
- `lightning_workers`, `lightning_loaders`: their workers, and each worker's share of the samples.
- `transformers`, `accelerate`: `Trainer` and Accelerate.
- `ray`: jobs on Ray; `ray_actors`, `ray_coordinator`, `ray_capacity`: actors, progress, resources.
- `common`: the arguments that all of them take.
- `versions`: which versions of a framework are taken.
- `accelerate_private`, `ray_private`: private names of these frameworks, in one place each.
"""
