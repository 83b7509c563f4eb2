"""The Kafka store. Begin with `store`, then `partition`: one owned partition and its pending index."""

__all__: list[str] = []
