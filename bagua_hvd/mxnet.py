"""`import bagua_hvd.mxnet` fails with a message that says why there is no front end."""
raise ModuleNotFoundError(
    "bagua_hvd has no front end for MXNet, which was retired in 2023: use bagua_hvd.torch, "
    "bagua_hvd.tensorflow or bagua_hvd.keras", name=__name__)
