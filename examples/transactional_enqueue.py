"""A job that exists if and only if the data that it is about does.

Enqueued on the caller's own connection, it is part of the caller's transaction. No outbox table, no job for an order
that was rolled back, no order whose job was lost between two commits.
"""

import os
import threading

import psycopg

import venturi

queue = venturi.Queue("example_transaction")
done = threading.Event()


@venturi.task("order.confirm")
class ConfirmOrder:
    number: int


@queue.handler
def confirm_order(task: ConfirmOrder) -> None:
    print("confirmed: order", task.number)
    done.set()


def order(conn: psycopg.Connection, number: int, *, in_stock: bool) -> None:
    """Take an order. It knows nothing of commits: they are its caller's business."""
    conn.execute("INSERT INTO orders VALUES (%s)", (number,))
    queue.enqueue(ConfirmOrder(number), conn=conn)
    if not in_stock:
        raise LookupError(f"order {number}: out of stock")


if __name__ == "__main__":
    queue.migrate()
    with psycopg.connect(os.environ.get("VENTURI_DATABASE_URL", ""), autocommit=True) as conn:
        conn.execute("CREATE TEMPORARY TABLE orders (number int)")

        try:
            with conn.transaction():
                order(conn, 1, in_stock=False)
        except LookupError as error:
            print("rolled back:", error)
        print("jobs after the rollback:", queue.stats().kinds.get("order.confirm", venturi.KindStats()).ready)

        with conn.transaction():
            order(conn, 2, in_stock=True)
            # Only this transaction sees the job yet; no worker does.
            print(
                "ready in here:",
                queue.stats(conn=conn).kinds["order.confirm"].ready,
                "- outside:",
                len(queue.stats().kinds),
            )

    queue.work(stop=done)
    queue.close()
