"""The heads that a role's model computes, and the output heads that it borrows from other roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlhf.errors import ModelError, TrainingError
from rlhf.interfaces import ModelSpec
from rlhf.ops.heads import OutputHead, gives, resolve_head
from rlhf.types import Head


def head_of_role(
    output: str | Head, over: str | None, role: str, kind: str, borrowed: Mapping[str, OutputHead]
) -> Head:
    """The head of an output, with the borrowed output heads that it computes with as constants.

    Args:
        over: the mask under which the head is computed, if not its own.
        role: the role's name.
        kind: the kind of the role's own head, ``lm`` | ``scalar`` | ``classes:N``.
        borrowed: {lending role: output head}.

    Raises TrainingError where the role's model does not give the output, or a head was not lent.
    """
    head = resolve_head(output, over)
    if isinstance(output, str) and not gives(kind, output):
        raise TrainingError(f"role {role!r} has a {kind!r} head, which does not give {output!r}")
    if not head.lent:
        return head
    if absent := [lender for lender in head.lent if lender not in borrowed]:
        raise TrainingError(
            f"head {head.name!r} computes with the output head of {', '.join(absent)}, which role {role!r} was not "
            "lent: the algorithm must declare it in Needs.lent"
        )
    return replace(head, constants={**head.constants, **{lender: borrowed[lender] for lender in head.lent}})


def comparable_head(head: OutputHead, lender: str, rows: int, spec: ModelSpec, tokens: int) -> OutputHead:
    """A lent head, cut to the rows that the borrower's head has too. Models of one family may pad their vocabularies
    differently.

    Args:
        lender: the role that lends it.
        rows: rows of the borrower's head.
        spec: the borrower.
        tokens: size of the borrower's tokenizer.

    Raises ModelError where either head has no row for some token.
    """
    kept = min(rows, head.vocabulary)
    if rows != head.vocabulary and kept < tokens:
        raise ModelError(
            f"role {lender!r} gives logits for {head.vocabulary} tokens and role {spec.role.name!r} ({spec.path!r}) "
            f"for {rows}, of a tokenizer with {tokens}. They cannot be compared: name a model with the same tokenizer "
            f"for {lender!r}."
        )
    return head.first(kept)
