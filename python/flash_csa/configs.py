"""The attention fields of the published models, under their published names.

Hand one to `LayerPlan.from_config`, or the path of any config.json that has these fields.
"""

_COMMON = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 1,
    "index_head_dim": 128,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
}

V41_FLASH = {
    **_COMMON,
    "model_type": "deepseek_v41",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "rms_norm_eps": 1e-20,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "index_n_heads": 32,
    "index_topk": 512,
}

V4_FLASH = {
    **_COMMON,
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4],
    "index_n_heads": 64,
    "index_topk": 512,
}

V4_PRO = {
    **_COMMON,
    "model_type": "deepseek_v4",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "rms_norm_eps": 1e-6,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4],
    "index_n_heads": 64,
    "index_topk": 1024,
}

BY_NAME = {"v41-flash": V41_FLASH, "v4-flash": V4_FLASH, "v4-pro": V4_PRO}
