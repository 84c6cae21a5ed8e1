"""Hot loops. Each has a plain torch reference, used on every device but the CPU, and a cache-blocked CPU form."""
