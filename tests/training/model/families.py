"""Networks of timm for the tests and for the table in the docs: family, arguments that make it small, image size."""

from __future__ import annotations

from typing import Any

_FOUR = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_WINDOWS = {"depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 2, 2, 4), "window_size": 2, "img_size": 64}
_TOKENS = {"depth": 2, "embed_dim": 48, "num_heads": 3}
_TOKENS_64, _TOKENS_70 = {**_TOKENS, "img_size": 64}, {**_TOKENS, "img_size": 70}

SMALL_FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": ({"layers": [1, 1, 1, 1], "channels": [8, 16, 24, 32]}, 64),
    "resnetv2_18": ({"layers": [1, 1, 1, 1], "channels": [8, 16, 24, 32]}, 64),
    "regnetx_002": ({}, 64),
    "repvgg_a0": ({}, 64),
    "densenet121": ({"growth_rate": 8, "block_config": (1, 1, 1, 1)}, 64),
    "mobilenetv3_small_050": ({}, 64),
    "mobilenetv4_conv_small_050": ({}, 64),
    "convnext_atto": (_FOUR, 64),
    "convnextv2_atto": (_FOUR, 64),
    "edgenext_xx_small": ({}, 64),
    "mobilevit_xxs": ({}, 64),
    "ghostnetv2_100": ({}, 64),
    "hgnetv2_b0": ({}, 64),
    "fastvit_t8": ({}, 64),
    "starnet_s1": ({}, 64),
    "levit_128s": ({"img_size": 64}, 64),
    "swin_tiny_patch4_window7_224": (_WINDOWS, 64),
    "swinv2_tiny_window8_256": (_WINDOWS, 64),
    "vit_tiny_patch16_224": (_TOKENS_64, 64),
    "vit_small_patch14_reg4_dinov2": (_TOKENS_70, 70),
    "vit_base_patch16_siglip_224": (_TOKENS_64, 64),
    "vit_small_patch16_dinov3": (_TOKENS_64, 64),
    "vit_pe_core_tiny_patch16_384": (_TOKENS_64, 64),
    "eva02_tiny_patch14_224": (_TOKENS_70, 70),
    "beit_base_patch16_224": (_TOKENS_64, 64),
    "deit_tiny_distilled_patch16_224": (_TOKENS_64, 64),
    "xcit_nano_12_p8_224": ({"depth": 2, "img_size": 64}, 64),
    "cait_xxs24_224": ({"depth": 2, "img_size": 64}, 64),
}
# Networks that cannot be cut: they are frozen whole.
WHOLE = {"xcit_nano_12_p8_224", "cait_xxs24_224"}
