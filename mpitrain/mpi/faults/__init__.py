"""Dead ranks: agreement, shrinking, abort, and the level of fault tolerance."""
