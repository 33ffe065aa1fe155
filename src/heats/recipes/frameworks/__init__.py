"""One small example for each training framework that Ray Train hosts."""
