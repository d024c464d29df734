"""What a bad kernel does to its process; run in the child by test_child.py."""

import ctypes
import os
import subprocess
import time


def answer(value, progress):
    progress("thinking")
    print("a kernel's printf")
    return value + 1, os.getpid()


def raises(progress):
    raise ValueError("not that")


def segfaults(progress):
    progress("case 7")
    ctypes.string_at(0)


def hangs(progress):
    progress("case 8")
    time.sleep(60)


def builds(ninja, progress):
    """Waits longer than it may, for a program of that name."""
    subprocess.run([ninja])
    return "built"


def aborts(progress):
    ctypes.CDLL(None).abort()


def exits(progress):
    os._exit(3)


def once(value):
    print("working")
    return value * 2


def once_hangs():
    time.sleep(60)
