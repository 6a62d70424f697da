"""Other hosts of a job, each reached by one connection of the OpenSSH client.

    connection.py  the launcher's end: an ssh process for each host, and the processes that are started there
    agent.py       the host's end: runs the processes, with the same supervisor as the launcher
    frames.py      what the two ends send each other
    network.py     the address of each host, from the probes' results

All secrets go through the connection. The agent ends with the connection, and all its processes with it.
"""
