"""How acknowledgements find their way to a broker's source."""

import itertools

from table import table

from producers import Delivery
from producers.sources.acknowledged import Deliveries
from stream_ssl.app.cli import main


class Told:
    """A source that notes what it is told."""

    def __init__(self):
        self.heard = []

    def acknowledged(self, position):
        self.heard.append(position)


def test_a_source_is_told_how_far_all_is_safe_in_whatever_order_the_news_comes():
    for order in itertools.permutations(range(4)):
        source, safe = Told(), set()
        deliveries = Deliveries(source)
        expected = [deliveries.expect(position) for position in range(4)]
        for one in order:
            if one == 2:
                expected[one].passed_over()
            else:
                expected[one](Delivery("x", "rejected" if one == 1 else "acknowledged"))
            safe.add(one)
            reached = next(n for n in range(5) if n not in safe) - 1
            assert (source.heard or [-1])[-1] == reached
        assert source.heard == sorted(set(source.heard))


def test_what_a_closing_producer_drops_holds_up_all_behind_it():
    source = Told()
    deliveries = Deliveries(source)
    expected = [deliveries.expect(position) for position in range(3)]
    for callback, outcome in zip(
        expected, ("acknowledged", "dropped", "acknowledged"), strict=True
    ):
        callback(Delivery("x", outcome))
    assert source.heard == [0]


@table(
    ("options", "why"),
    [
        (["--shape.duplicates", "0.5"], "only --shape.rate and --shape.limit apply"),
        (["--parked.share", "0.9"], "only --shape.rate and --shape.limit apply"),
        (["--producer.on_full", "drop_oldest"], "the broker of source 'kafka' keeps what"),
    ],
)
def test_what_would_part_messages_from_acknowledgements_is_refused(options, why, caplog):
    source = ["kafka", "--source.topic", "frames", "--source.group", "g"]
    command = ["produce", *source, "--to", "tcp://127.0.0.1:1", "--name", "robot", *options]
    assert main(command) == 2
    assert why in caplog.text
