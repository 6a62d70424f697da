"""Other hosts of a job, each by one connection of the OpenSSH client.

    connection.py  the launcher's end: an ssh process for each host, and the processes that run there
    agent.py       the host's end: runs the processes, with the supervisor that the launcher uses, too
    frames.py      what goes through the connection
    network.py     which address each host is given, from what the probes found
    spawner.py     starts processes on all other hosts

Everything secret goes through the connection. The agent ends with the connection, and all its processes with it.
"""
