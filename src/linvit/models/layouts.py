"""Layouts of other libraries' vision transformers: their keys, and what their configurations call things."""

from __future__ import annotations

from typing import NamedTuple

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALVES = 0.5, 0.5

# Keys without "vit." and the like → linvit's; `#` is a layer's number, `*` weight or bias, and what maps to nothing
# belongs to other tasks.
LAYER = r"(?:(?:model|encoder)\.)?layers?\.#\."
UNUSED_POOLING = {r"head\..+": ""}  # of a model that does not pool with it
HUGGING_FACE = {
    r"embeddings\.(cls|distillation)_token": r"\1",
    r"embeddings\.register_tokens": "registers",
    r"embeddings\.position_embeddings": "position",
    r"embeddings\.position_embedding\.weight": "position",
    r"embeddings\.patch_embeddings?\.(?:projection\.)?*": r"stem.embed.\1",
    LAYER + r"(?:layernorm_before|layer_norm1|norm1)\.*": r"blocks.\1.norm1.\2",
    LAYER + r"(?:layernorm_after|layer_norm2|norm2)\.*": r"blocks.\1.norm2.\2",
    LAYER + r"(?:attention|self_attn)\.(?:attention\.)?([qkv])(?:uery|ey|alue|_proj)\.*": r"blocks.\1.attn.\2_proj.\3",
    LAYER + r"(?:attention|self_attn)\.(?:output\.dense|o_proj|out_proj)\.*": r"blocks.\1.attn.proj.\2",
    LAYER + r"(?:attention|self_attn)\.linvit\.(.+)": r"blocks.\1.attn.attention.\2",
    LAYER + r"(?:intermediate\.dense|mlp\.fc1|mlp\.weights_in)\.*": r"blocks.\1.mlp.0.\2",
    LAYER + r"mlp\.(gate|up)_proj\.*": r"blocks.\1.mlp.\2.\3",
    LAYER + r"(?:output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.*": r"blocks.\1.mlp.3.\2",
    LAYER + r"layer_scale([12])\.lambda1": r"blocks.\1.scale\2",
    r"(?:layernorm|post_layernorm|norm)\.*": r"norm.\1",
    r"head\.probe": "pooling.probe",
    r"head\.attention\.in_proj_*": r"pooling.qkv.\1",
    r"head\.attention\.out_proj\.*": r"pooling.proj.\1",
    r"head\.layernorm\.*": r"pooling.norm.\1",
    r"head\.mlp\.fc1\.*": r"pooling.mlp.0.\1",
    r"head\.mlp\.fc2\.*": r"pooling.mlp.3.\1",
    r"classifier\.*": r"head.\1",
    r"embeddings\.mask_token|embeddings\.position_ids|pooler\.dense\.*|text_model\..+|logit_(?:scale|bias)": "",
}
TIMM = {
    r"cls_token": "cls",
    r"reg_token": "registers",
    r"pos_embed": "position",
    r"patch_embed\.proj\.*": r"stem.embed.\1",
    r"blocks\.#\.(norm[12]|attn\.(?:qkv|[qkv]_proj|proj))\.*": r"blocks.\1.\2.\3",
    r"blocks\.#\.attn\.([qv])_bias": r"blocks.\1.attn.\2_proj.bias",
    r"blocks\.#\.mlp\.fc1\.*": r"blocks.\1.mlp.0.\2",
    r"blocks\.#\.mlp\.fc1_g\.*": r"blocks.\1.mlp.gate.\2",
    r"blocks\.#\.mlp\.fc1_x\.*": r"blocks.\1.mlp.up.\2",
    r"blocks\.#\.mlp\.norm\.*": r"blocks.\1.mlp.1.norm.\2",
    r"blocks\.#\.mlp\.fc2\.*": r"blocks.\1.mlp.3.\2",
    r"blocks\.#\.ls([12])\.gamma": r"blocks.\1.scale\2",
    r"(?:fc_)?norm\.*": r"norm.\1",
    r"head\.*": r"head.\1",
}
TORCHVISION = {
    r"class_token": "cls",
    r"encoder\.pos_embedding": "position",
    r"conv_proj\.*": r"stem.embed.\1",
    r"encoder\.layers\.encoder_layer_#\.ln_([12])\.*": r"blocks.\1.norm\2.\3",
    r"encoder\.layers\.encoder_layer_#\.self_attention\.in_proj_*": r"blocks.\1.attn.qkv.\2",
    r"encoder\.layers\.encoder_layer_#\.self_attention\.out_proj\.*": r"blocks.\1.attn.proj.\2",
    r"encoder\.layers\.encoder_layer_#\.mlp\.(?:0|linear_1)\.*": r"blocks.\1.mlp.0.\2",
    r"encoder\.layers\.encoder_layer_#\.mlp\.(?:3|linear_2)\.*": r"blocks.\1.mlp.3.\2",
    r"encoder\.ln\.*": r"norm.\1",
    r"heads\.head\.*": r"head.\1",
}
HEADS = {  # by the size in a name, where no configuration says it
    "tiny": 3,
    "small": 6,
    "base": 12,
    "large": 16,
    "huge": 16,
    "giant": 16,
    "gigantic": 16,
    "medium": 8,
    "b": 12,
    "l": 16,
    "h": 16,
}
SIZES = {  # width and depth by the size in a plain name: of a file that was cut short, nothing else tells
    "tiny": (192, 12),
    "small": (384, 12),
    "base": (768, 12),
    "large": (1024, 24),
    "b": (768, 12),
    "l": (1024, 24),
    "h": (1280, 32),
}
PLAIN = r"(?:vit|deit3?)_(tiny|small|base|large)_patch\d+(?:_(?:\d+|reg\d+|gap|dinov2|in21k))*(?:\..*)?"  # timm's
SAID_BY_HUGGING_FACE = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "intermediate_size": "mlp_dim",
    "patch_size": "patch_size",
    "num_channels": "channels",
    "num_register_tokens": "registers",
    "qkv_bias": "qkv_bias",
}
SAID_BY_TIMM = {  # inside model_args
    "embed_dim": "dim",
    "depth": "depth",
    "patch_size": "patch_size",
    "img_size": "image_size",
    "in_chans": "channels",
    "num_classes": "classes",
    "reg_tokens": "registers",
    "qkv_bias": "qkv_bias",
}
# A Hugging Face activation → linvit's MLP.
UNGATED = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh"}
GATED = {"silu": "swiglu", "gelu": "geglu"}


class Kind(NamedTuple):
    """What a Hugging Face model_type implies in addition to its configuration."""

    norm_eps: float
    mean_std: tuple
    pool: str  # of a model without classes
    pool_classified: str
    activation: str = "gelu"
    heads: int | None = None  # where a configuration may leave them out
    rope: str | None = None  # in place of learned positions
    biases: tuple[tuple[str, str, bool], ...] = ()  # q, k or v, the field, and whether there is one by default
    antialias: bool = False  # when positions are interpolated


DINOV2 = Kind(1e-6, IMAGENET, "cls", "cls-mean")
DINOV3 = Kind(1e-5, IMAGENET, "cls", "cls", rope="dinov3")
SIGLIP = Kind(1e-6, HALVES, "attention", "norm-mean", activation="gelu_pytorch_tanh", heads=12)
HUGGING_FACE_KINDS = {
    "vit": Kind(1e-12, HALVES, "cls", "cls"),
    "deit": Kind(1e-12, IMAGENET, "cls", "cls"),
    "dinov2": DINOV2,
    "dinov2_with_registers": DINOV2._replace(antialias=True),
    "dinov3_vit": DINOV3._replace(
        biases=(("q", "query_bias", True), ("k", "key_bias", False), ("v", "value_bias", True))
    ),
    "siglip_vision_model": SIGLIP,
    "siglip": SIGLIP,
}
