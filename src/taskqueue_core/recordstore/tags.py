"""The tasks of a `RecordStore` by tag: links ``tag KEY DIGEST NUMBER ID``, in the order of the publishes."""

from __future__ import annotations

from hashlib import blake2b

from taskqueue_core.authoring.listings import indexed_tags
from taskqueue_core.recordstore.store import Record, RecordStore


def add_tags(store: RecordStore, record: Record, number: int) -> None:
    """Let a task be found by those of its tags that its queue indexes. The caller saves the record."""
    record.indexed = indexed_tags(store.settings(record.task.key).index, record.task.tags)
    record.number = number
    for tag in record.indexed:
        store.save_link(_name(record, tag), b"")


def remove_tags(store: RecordStore, record: Record) -> None:
    """Let a task be found by no tag any more. The caller saves or deletes the record."""
    for tag in record.indexed:
        store.drop_link(_name(record, tag))
    record.indexed = ()


def links_of(key: str, tag: str) -> str:
    """Return the text with which the names of the links of a tag begin."""
    digest = blake2b(tag.encode(), digest_size=16).hexdigest()
    return f"tag {key} {digest} "


def tag_place(record: Record) -> str:
    """Return the place of a task in the lists of its tags."""
    return f"{record.number:020} {record.task.id}"


def _name(record: Record, tag: str) -> str:
    return links_of(record.task.key, tag) + tag_place(record)
