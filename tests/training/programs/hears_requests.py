"""Prints what it has been asked, and ends by nothing but what ends it at once. Arguments: after how long a second TERM
does; "stuck" where the main thread waits in native code, with signals handled and the wait taken up, from the first on.
"""

import ctypes
import sys
import time

from mpitrain.system.launched import end_requests
from mpitrain.training import signals

end_requests.AGAIN_S = signals.AGAIN_S = float(sys.argv[1])
signals.install_early()
print("ready", flush=True)
while not signals.asked():
    time.sleep(0.01)
print("asked", flush=True)
if "stuck" in sys.argv:
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
while True:
    time.sleep(0.01)
