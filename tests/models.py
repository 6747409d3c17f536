"""Configurations of models that are nobody's, for tests."""

from flash_csa import configs


def group_of_eight(ratio: int, pool_blocks: int) -> dict:
    """The fields of one Full, two Reindex and five Reuse layers. Ratio 4 is of V4's family."""
    return {
        **configs.V41_FLASH,
        "model_type": "deepseek_v4" if ratio == 4 else "deepseek_v41",
        "num_hidden_layers": 8,
        "compress_ratios": [ratio] * 8,
        "kv_source_layer_ids": [0],
        "index_source_layer_ids": [0, 3, 6],
        "candidate_source_layer_id": 0,
        "candidate_topk_blocks": pool_blocks,
    }
