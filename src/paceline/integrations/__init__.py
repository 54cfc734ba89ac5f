"""Where people train: trainers of others, each imported only by those who use it.

========================  ==================================  ==============================
module                    what it gives                       extra
========================  ==================================  ==============================
``lightning``             ``Trainer(strategy="paceline")``    ``pip install paceline[lightning]``
``fabric``                ``Fabric(strategy=FabricStrategy())``  the same
``transformers``          ``attach(trainer, method=...)``     ``pip install paceline[transformers]``
``accelerate``            ``prepare(accelerator, ...)``       the same
========================  ==================================  ==============================

None of them averages anything by itself: each keeps its framework from wrapping the model in
DistributedDataParallel, and hands the plain model to `paceline.distribute`.
"""
