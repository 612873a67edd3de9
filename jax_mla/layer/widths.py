"""The widths that all models of the family share, and that the kernels are written for."""

LATENT = 512  # kv_lora_rank
ROPE = 64  # qk_rope_head_dim
NOPE = 128  # qk_nope_head_dim
VALUE = 128  # v_head_dim
HEAD_DIM = NOPE + ROPE
