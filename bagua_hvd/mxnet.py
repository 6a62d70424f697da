"""`import bagua_hvd.mxnet` says why there is nothing."""
raise ModuleNotFoundError(
    "bagua_hvd has no front end for MXNet, which its developers have retired in 2023: train with bagua_hvd.torch, "
    "bagua_hvd.tensorflow or bagua_hvd.keras", name=__name__)
