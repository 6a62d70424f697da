"""Other hosts of a job, each reached by one connection of the OpenSSH client; all secrets go through it.

The agent at its other end ends with the connection, and all its processes with it.
"""
