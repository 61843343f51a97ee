"""Common English words of five letters."""

_TEXT = """
about above actor admit adult after again agent agree ahead alarm album alert alike alive allow alone along alter among anger angle
angry apart apple apply arena argue arise armor array aside asset audio avoid award aware bacon badge baker basic basin basis beach
beard beast begin being below bench berry birth black blade blame blank blast blaze blend bless blind block blood bloom board boast
bonus boost booth bound brain brake brand brave bread break breed brick bride brief bring broad broom brown brush build bunch cabin
cable camel candy canoe cargo carry catch cause chain chair chalk charm chart chase cheap check cheek cheer chess chest chief child
chill china choir chord civic claim clash class clean clear clerk click cliff climb clock close cloth cloud clown coach coast coral
couch cough count court cover crack craft crane crash crate cream creek crime crisp cross crowd crown crude cruel crush curve cycle
daily dairy daisy dance delay depth diary dirty ditch doubt dough draft drain drama dream dress drift drill drink drive eager eagle
early earth eight elbow elder elect empty enemy enjoy enter entry equal error essay event every exact exist extra fable faith false
fancy fault favor feast fence ferry fever fiber field fifth fight final first flame flash fleet flesh float flock flood floor flour
fluid focus force forge forth forty found frame fresh front frost fruit funny giant glass globe glory glove grace grade grain grand
grape grass grave great green greet grief grill group grove guard guess guest guide habit happy harsh heart heavy hobby honey honor
horse hotel house human humor ideal image index inner input ivory jelly jewel joint judge juice knife knock label labor large laser
later laugh layer learn lemon level light limit linen liver local logic loose lower loyal lucky lunch magic major maple march marry
match mayor medal merit metal meter minor mixed model money month moral motor mount mouse mouth movie music nerve never night noble
noise north novel nurse ocean offer often olive onion opera orbit order other outer owner paint panel paper party paste pause peace
pearl phase phone photo piano piece pilot pitch place plain plane plant plate plaza point porch pound power press price pride prime
print prize proof proud pulse punch pupil queen quick quiet quite radar radio raise ranch range rapid ratio reach react ready realm
rebel reply rider ridge rifle right rigid rival river roast robin robot rocky rough round route royal rural salad sauce scale scarf
scene scope score scout sense serve seven shade shake shape share shark sharp sheep sheet shelf shell shine shirt shock shore short
shout sight silly skill skirt sleep slice slide slope small smart smell smile smoke snake solar solid solve sound south space spare
spark speak speed spell spend spice spoon sport staff stage stair stamp stand stare start state steam steel steep stick stiff still
stock stone stool store storm story stove strap straw strip study stuff style sugar sunny sweet swift swing sword table taste teach
thank theme thick thief thing think third thorn three throw thumb tiger tight title toast today tooth topic torch total touch tough
towel tower trace track trade trail train treat trend trial tribe trick truck trunk trust truth twice uncle under union unity upper
urban usual valid value vapor video visit vital voice wagon waste watch water weigh whale wheat wheel where white whole widow woman
world worry worth wound wrist write wrong yield young youth zebra
"""
WORDS = tuple(_TEXT.split())
