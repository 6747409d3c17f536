"""The algorithm, written to be read: every stage as plain PyTorch in FP32 and FP64.

Nothing here calls the compiled library; only the record layout is common to both, and it is
stated here a second time (`layout`), so that the two check each other.

Read in the order of the data flow:

    layout    bytes of the five records and of their pages
    quant     E2M1, E4M3, UE8M0, BF16 and the group quantisers
    pages     records in pages: store, load
    rope      frequencies, cos/sin table, rotation and its inverse
    step      what a query sees, which slots a step reads and writes
    compress  tokens -> entries: pooling, norm, latent, main row, index key
    index     scores of the entries that a query may see
    select    top-k, candidate pools, merging of shards
    attend    softmax attention over window and selected entries, with a sink
    group     a group of layers on one sequence: Full, Reindex, Reuse
    ops       the same with the arguments of the library's ops: pages, tables, slots

Unless a docstring says otherwise, shapes are those of one sequence: T tokens, H heads,
N entries, K selected. "precision" is the type in which a formula is evaluated between two
roundings that belong to the model; FP64 is the definition, FP32 shows what order of summation
can change.
"""
