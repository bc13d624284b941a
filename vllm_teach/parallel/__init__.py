"""Several processes that compute one model: who they are, how they start, what they say to each other, how they end.

The scheme is Megatron-LM's (Shoeybi et al. 2019, arXiv 1909.08053, section 3): each rank has a part of every matrix,
and the ranks add up what they computed twice a layer. Rank 0 *drives*: it alone knows requests, and tells the others
what to compute. Everything goes over `torch.distributed` process groups of the room's own; the process's default group,
which may be somebody else's, is left alone.
"""
