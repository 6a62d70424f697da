"""`import bagua_hvd.spark` says what there is instead."""
raise ModuleNotFoundError(
    "bagua_hvd has no integration with Spark yet: write the data to files that all hosts see, and start the training "
    "by `baguarun -H host1:4,host2:4 ...` or bagua_hvd.run(function, hosts=...)", name=__name__)
