"""`make coverage` puts this folder on PYTHONPATH: every Python that the tests start then measures itself."""

import coverage

coverage.process_startup()
