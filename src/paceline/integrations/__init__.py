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
"""
