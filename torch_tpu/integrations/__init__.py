"""What single libraries need in order to work on "tpu" unchanged. Nothing here is imported unless a program asks for it."""
