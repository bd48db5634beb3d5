"""Images in rows: references to them in documents, their pixels, and the positions of their tokens."""
