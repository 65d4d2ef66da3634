"""A text that no model was trained on, written for this project: on it quantized models are held against others."""

HELD_OUT = """\
The harbour office closed at six, but the clerk stayed until the last of the fishing boats had tied up. She wrote down
the name of each one, the hour, and how many crates of mackerel came ashore. Nobody had asked for such a list in eleven
years. When her successor found the notebooks he thought of throwing them away, and then noticed that the catches rose
and fell with the price of diesel rather than with the weather. That discovery became the first page of a report which
the council read with some embarrassment.

A bicycle stays upright for reasons that are easy to state and hard to believe. If it leans to the left, the front wheel
turns to the left by itself, and the whole machine steers back under its own weight. The spinning wheels help a little.
So does the trail, the distance by which the tyre touches the ground behind the point where the steering axis would meet
it. Remove one of the two effects and the bicycle can still balance; remove both and a rider has to do the work alone.

To make bread without a scale, begin with two cups of flour and a pinch of salt. Add warm water a little at a time and
stir until no dry flour is left at the bottom of the bowl. Cover it and wait. After an hour the dough will have relaxed
enough to be folded, first from the north and the south, then from the east and the west. Repeat this three times, let
it rise overnight in a cool place, and bake it the next morning in a pot with a lid. The crust should sound hollow when
you knock on it.

Suppose that a train leaves the city at nine and travels at eighty kilometres an hour, and that a second train leaves
the same station half an hour later at one hundred. When does the second one catch the first? In the half hour before
it starts, the first has gone forty kilometres. Every hour the gap shrinks by twenty. Forty divided by twenty is two, so
the second train needs two hours, and they meet at half past eleven, two hundred kilometres from the city.

The committee agreed on three rules. First, a member who wants to speak raises a hand and waits. Second, no proposal is
voted on during the meeting in which it was made. Third, whoever loses a vote may have one paragraph in the minutes.
"The third rule is the expensive one," said the secretary, "because paragraphs grow." By the end of the year the minutes
were twice as long as the decisions, and also twice as useful, since they said what had been given up each time.

Glaciers move in two ways. The ice deforms under its own load, a few centimetres a day, slowest near the bed and fastest
near the surface. And where water collects underneath, the whole mass slides. The second way is the less predictable:
a warm week in summer can double the speed for a month, and a cold one can halt it. Instruments buried in the ice drift
apart over the years, which is how we know that the middle of a valley glacier outruns its edges.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

The function above sorts a copy, so the list that it is given stays as it was. For an even number of values it returns
the mean of the two in the middle. An empty list raises an IndexError, which is perhaps not what a caller expects; a
clearer program would test for it and say so.

My grandmother kept bees on the roof of a printing works. In April they flew to the lime trees along the canal, in July
to the railway embankment where nobody mowed. She could tell by the colour of the honey which week it was from. The
printers complained only once, when a swarm settled on the sign above the entrance and the morning shift had to come in
through the paper store. She carried the swarm away in a hatbox, and the foreman got six jars that autumn.

Insurance works because misfortunes are rarely shared. A thousand households each face a small chance of fire, and the
number of fires in a year is close to what the average predicts. An earthquake breaks this assumption. It strikes all of
them on the same day, and the fund that was large enough for any ordinary year is empty by the evening. For this reason
insurers buy insurance themselves, from companies whose customers live in other parts of the world.

Question: which is heavier, a litre of ice or a litre of water? Answer: the litre of water. Ice floats, so it must weigh
less than the water that it displaces, about eighty grams less for each litre. If the question had been about a kilogram
of each, the answer would have been that they weigh the same and that the ice takes up more room.

In the old town the streets were named after trades. Rope makers needed a long straight lane, tanners a stream, and
smiths a distance from everybody else. When the trades left, the names stayed, and visitors looked for ropes in vain. A
teacher once let her class draw a map of the town as it must have been, from nothing but the names. They placed the
market correctly, and the mill, and were wrong about the gallows only because two streets had been exchanged in a fire.
"""
