"""Tables of rows that live on parameter servers: who holds which row, the rows themselves, and what travels of them.

Invariants: a worker holds the rows of its present batch and no others; a server holds the rows that fall to it. Ids are
numbers of rows; a slot is where a row lies on its server.
"""
