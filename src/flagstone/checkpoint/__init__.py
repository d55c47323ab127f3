"""The folder on disk, and the ways into it and out of it. Knows tensors only as names, types, shapes and bytes."""
