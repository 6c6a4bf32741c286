"""A job in the background of a shell starts with SIGINT ignored, and so would all that these tests start; some of them send SIGINT."""
import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
