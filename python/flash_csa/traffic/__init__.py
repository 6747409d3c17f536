"""HBM traffic of a step: the model's bytes, and beside them what the memory controller counted.

model     bytes by stage and kind, pages, sectors and temporaries, from `accounting`
kernels   one call of every kernel of a step, on random records
ncu       runs a program under Nsight Compute and reads its counters
plot      bytes over context length; a roofline
"""
