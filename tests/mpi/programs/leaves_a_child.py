"""A rank that ends well and leaves a process behind. Argument: a file for the process's number."""

import subprocess
import sys

child = subprocess.Popen(["sleep", "1000"], stdin=-3, stdout=-3, stderr=-3)
with open(sys.argv[1], "a") as file:
    file.write(f"{child.pid}\n")
