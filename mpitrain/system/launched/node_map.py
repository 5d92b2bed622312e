"""Naming ranks and nodes: pure functions, no MPI."""


def node_indices(names: list[str]) -> tuple[int, ...]:
    """Node index of every rank: nodes are numbered in the order in which the ranks meet them."""
    order = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return tuple(order[name] for name in names)


def name_ranks(ranks: list[int], size: int) -> str:
    """ "rank 2", "ranks 0-3, 6" or "all ranks" for ascending `ranks` out of `size`."""
    if len(ranks) == size:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
