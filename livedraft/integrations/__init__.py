"""Other engines as the thing that serves; livedraft learns beside them."""
