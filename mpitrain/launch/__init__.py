"""Starting ranks: finding the launcher, supervising what it has started, starting again."""
