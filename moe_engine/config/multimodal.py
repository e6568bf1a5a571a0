"""Flags of images in prompts, for models with a vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.field import flag
from moe_engine.config.values import parse_json_object


@dataclass(frozen=True)
class MultimodalArgs:
    language_model_only: bool = flag(
        False, "Load only the language model of a checkpoint with a vision tower: images are refused."
    )
    allowed_local_media_path: str | None = flag(
        None,
        "Folder below which requests may name image files, as paths or file:// addresses. Default: files are refused.",
        metavar="FOLDER",
    )
    allow_private_media_urls: bool = flag(
        False,
        "Images may come from private addresses (127.0.0.1, 10.0.0.0/8, ...), also by redirects. By default a request "
        "cannot make the server read from its own network.",
    )
    media_fetch_timeout: float = flag(
        10.0, "Seconds for reading one image from an address, redirects included.", metavar="SECONDS"
    )
    max_media_mb: int = flag(
        32,
        "Largest image of a request in MB (2^20 bytes), as it is encoded (JPEG, PNG, ...).",
        aliases=("--media-url-max-file-size-mb",),
        metavar="MB",
    )
    max_media_megapixels: int = flag(
        64,
        "Largest image of a request in megapixels (2^20), by its header: larger images are refused before decoding.",
        metavar="MP",
    )
    mm_process_config: str = flag(
        "{}",
        "JSON object with bounds for the size to which images are scaled, in place of the checkpoint's: "
        '\'{"image": {"max_pixels": 1003520, "min_pixels": 3136}}\'.',
        parse=parse_json_object,
        metavar="JSON",
    )
    mm_enable_dp_encoder: bool = flag(
        False,
        "The ranks of an attention group divide the images of a step among themselves, and exchange the results of the "
        "vision tower. By default each rank encodes every image.",
    )
    allowed_media_domains: str = flag(
        "",
        "Hosts from which images are read, redirects included, for instance cdn.example.com. Left out: all public "
        "hosts.",
        many=True,
        metavar="HOST",
    )
    limit_mm_data_per_request: str = flag(
        '{"image": 16}',
        "JSON object with the maximum number of images of a request, for example '{\"image\": 4}'.",
        parse=parse_json_object,
        metavar="JSON",
    )
    vlm_cache_size_mb: int = flag(
        100,
        "Results of the vision tower that each rank keeps, in MB (2^20 bytes): a repeated image is not encoded again.",
        metavar="MB",
    )
