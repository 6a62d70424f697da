"""`import bagua_hvd.ray` says what there is instead."""
raise ModuleNotFoundError(
    "bagua_hvd has no integration with Ray yet: start the ranks on the cluster's nodes by "
    "`baguarun -H node1:4,node2:4 ...` or bagua_hvd.run(function, hosts=...); where nodes come and go, subclass "
    "bagua_hvd.runner.elastic.discovery.HostDiscovery, or give --host-discovery-script", name=__name__)
