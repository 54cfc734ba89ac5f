"""Integrations with trainers and engines, each imported only when it is used.

========================  ==================================  ==============================
module                    provides                            extra
========================  ==================================  ==============================
``lightning``             ``Trainer(strategy="paceline")``    ``pip install -e .[lightning]``
``fabric``                ``Fabric(strategy=FabricStrategy())``  the same
``transformers``          ``attach(trainer, method=...)``     ``pip install -e .[transformers]``
``accelerate``            ``prepare(accelerator, ...)``       the same
``ray``                   ``run(loop, workers=...)``          ``pip install -e .[ray]``
========================  ==================================  ==============================

None of them averages gradients itself: each keeps its trainer from wrapping the model in DistributedDataParallel,
and passes the plain model to `paceline.distribute`.

- `fabric`, `lightning`: strategies of Fabric and Lightning, their workers and shares of samples.
- `accelerate`, `transformers`: Accelerate, and `Trainer` over it.
- `ray`: jobs on Ray, and their resources; `ray_job`: server, workers and coordinator.
- `common`: versions, options and checks that all of them share.
"""
