"""What the operating system and the launcher give: files, folders, processes and the variables of a launch.

Standard library only.
"""
