"""The native core in Python: its module, its contexts and operations, memory as it sees it. Knows no job."""
