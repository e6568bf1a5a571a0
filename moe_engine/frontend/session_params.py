"""The field `session_params` of requests, with SGLang's names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

SessionName = Annotated[str, Meta(max_length=256)]


class SessionParams(Struct, kw_only=True):
    """`rid`: an earlier request of the session, which the new one continues; null: the first of a conversation."""

    id: SessionName | None = None
    rid: SessionName | None = None
    offset: Annotated[int | None, Meta(description="tokens of the earlier request that stay; 0 and null: all")] = None
    replace: Annotated[
        bool | None, Meta(description="true: the earlier request ends, and later ones are forgotten")
    ] = None
    drop_previous_output: Annotated[bool | None, Meta(description="true: only the earlier prompt stays")] = None

    @property
    def is_empty(self) -> bool:
        return not (self.id or self.rid or self.offset or self.replace or self.drop_previous_output)
