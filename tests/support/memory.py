"""The memory use of this process."""
import ctypes
import os


def resident_nbytes():
    """Resident memory in bytes, after the allocator has returned its free memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]


def allocated_nbytes():
    """Bytes allocated by malloc and not yet freed (needs glibc 2.33); under PYTHONMALLOC=malloc, Python's objects too.

    Unlike resident memory, this does not depend on how full the pages are that the allocator keeps.
    """
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return info.uordblks + info.hblkhd
