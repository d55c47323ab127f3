"""From the things people train with to names, types, shapes, regions and bytes, and back."""
