"""Arrays that the whole process shares."""

from threading import Event, Thread

import numpy as np

from paged.base.growing import GrowingView


def test_a_view_is_as_long_as_asked_for_though_another_thread_makes_a_shorter_array_meanwhile():
    has_begun, may_end = Event(), Event()

    class Long(np.ndarray):
        @property
        def flags(self):
            # The other thread ends between the making of this array and the view of it.
            may_end.set()
            other.join()
            return super().flags

    def make(length):
        if length == 2:
            has_begun.set()
            may_end.wait()
        return np.arange(length).view(Long if length == 200 else np.ndarray)

    view = GrowingView(make)
    other = Thread(target=view.first, args=(1,))
    other.start()
    has_begun.wait()
    assert len(view.first(100)) == 100
