"""Files and folders: what is written whole, run directories and their locks."""
